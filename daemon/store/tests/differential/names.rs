//! The renaming between the model's names and the database's: one to one, for good.

use std::collections::HashMap;
use uuid::Uuid;

#[derive(Default)]
pub(crate) struct Names {
    model: HashMap<Uuid, Uuid>,
    database: HashMap<Uuid, Uuid>,
}

impl Names {
    /// The two name the same thing. `false`: one of them names another thing already.
    pub(crate) fn bind(&mut self, model: Uuid, database: Uuid) -> bool {
        let one = *self.model.entry(database).or_insert(model);
        let other = *self.database.entry(model).or_insert(database);
        one == model && other == database
    }

    /// The model's name of what the database calls so; an unknown name stands for itself.
    pub(crate) fn model(&self, database: Uuid) -> Uuid {
        self.model.get(&database).copied().unwrap_or(database)
    }

    pub(crate) fn database(&self, model: Uuid) -> Uuid {
        self.database.get(&model).copied().unwrap_or(model)
    }

    /// A line from the database, with all names in it as the model has them.
    pub(crate) fn translate(&self, line: &str) -> String {
        line.split_inclusive([' ', ','])
            .map(|piece| {
                let word = piece.trim_end_matches([' ', ',']);
                match Uuid::try_parse(word) {
                    Ok(name) if word.len() == 36 => format!("{}{}", self.model(name), &piece[36..]),
                    _ => piece.to_owned(),
                }
            })
            .collect()
    }
}
