//! What a handler gets: one JSON object a job, the same for every kind of handler.
//!
//! Invariant: `data` goes through byte for byte; no number in it is ever read as a number.

use uuid::Uuid;

use crate::json::Object;

/// One attempt of one job, as its handler sees it.
#[derive(Debug, Clone, Copy)]
pub struct Envelope<'a> {
    /// The job.
    pub id: Uuid,
    /// Its job type.
    pub job_type: &'a str,
    /// What the producer gave, as the JSON text that PostgreSQL gives.
    pub data: &'a str,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// The attempt after which a failure is final.
    pub max_attempts: u32,
    /// The fencing token of this attempt's lease.
    pub token: Uuid,
    /// Whose job it is.
    pub tenant: &'a str,
    /// When the job was enqueued, RFC 3339.
    pub enqueued_at: &'a str,
    /// Where to say how it ended, for a handler that answers 202.
    pub callback: Option<&'a str>,
    /// When the attempt is stopped, RFC 3339.
    pub deadline: Option<&'a str>,
    /// How far the job's series has come, JSON text; `None`: it has none, or nobody has said yet.
    pub watermark: Option<&'a str>,
    /// The W3C trace context of the producer.
    pub traceparent: Option<&'a str>,
}

impl Envelope<'_> {
    /// The envelope as one JSON object without a line break of its own.
    pub fn to_json(&self) -> String {
        let mut object = Object::with_capacity(self.data.len() + 512);
        object
            .text("id", &self.id.to_string())
            .text("type", self.job_type);
        self.rest(object)
    }

    /// The envelope as a line of the type `job`, so its own `type` is called `job_type`.
    pub(crate) fn to_line(self) -> String {
        let mut object = Object::with_capacity(self.data.len() + 512);
        object
            .text("type", "job")
            .text("id", &self.id.to_string())
            .text("job_type", self.job_type);
        self.rest(object)
    }

    fn rest(&self, mut object: Object) -> String {
        object
            .raw("data", self.data)
            .raw("attempt", &self.attempt.to_string())
            .raw("max_attempts", &self.max_attempts.to_string())
            .text("token", &self.token.to_string())
            .text("tenant", self.tenant)
            .text("enqueued_at", self.enqueued_at);
        match self.deadline {
            Some(deadline) => object.text("deadline", deadline),
            None => object.raw("deadline", "null"),
        };
        if let Some(watermark) = self.watermark {
            object.raw("watermark", watermark);
        }
        if let Some(callback) = self.callback {
            object.text("callback", callback);
        }
        if let Some(traceparent) = self.traceparent {
            object.text("traceparent", traceparent);
        }
        object.finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn envelope(data: &str) -> Envelope<'_> {
        Envelope {
            id: Uuid::nil(),
            job_type: "re\"port",
            data,
            attempt: 1,
            max_attempts: 3,
            token: Uuid::max(),
            tenant: "default",
            enqueued_at: "2026-11-30T20:00:00Z",
            callback: None,
            deadline: None,
            watermark: None,
            traceparent: None,
        }
    }

    #[test]
    fn has_the_members_of_the_contract() {
        assert_eq!(
            envelope(r#"{"a": 1}"#).to_json(),
            concat!(
                r#"{"id":"00000000-0000-0000-0000-000000000000","type":"re\"port","data":{"a": 1},"attempt":1,"#,
                r#""max_attempts":3,"token":"ffffffff-ffff-ffff-ffff-ffffffffffff","tenant":"default","#,
                r#""enqueued_at":"2026-11-30T20:00:00Z","deadline":null}"#
            )
        );
        let with_all = Envelope {
            deadline: Some("2026-11-30T20:05:00Z"),
            watermark: Some(r#"{"until":18446744073709551616}"#),
            callback: Some("http://tenure/v1/jobs/1"),
            traceparent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            ..envelope("1")
        };
        let value: serde_json::Value = serde_json::from_str(&with_all.to_json()).unwrap();
        assert_eq!(value["deadline"], "2026-11-30T20:05:00Z");
        assert_eq!(value["callback"], "http://tenure/v1/jobs/1");
        assert!(
            with_all
                .to_json()
                .contains(r#""watermark":{"until":18446744073709551616}"#)
        );
        assert!(
            value["traceparent"]
                .as_str()
                .unwrap()
                .starts_with("00-4bf9")
        );
    }

    #[test]
    fn data_is_passed_byte_for_byte() {
        let data = r#"{"id": 1970670598291982290, "u":18446744073709551616, "d":0.10000000000000000000001, "t":"é\u00e9"}"#;
        assert!(envelope(data).to_json().contains(data));
    }
}
