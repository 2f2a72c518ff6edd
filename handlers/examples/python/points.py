#!/usr/bin/env python3
"""Adds points to an account, once for each job, in the database that the jobs are in.

    [handlers.points]
    exec = { command = ["handlers/examples/python/points.py"], env = ["DATABASE_URL"], timeout = "1m" }

    CREATE TABLE account (name text PRIMARY KEY, points bigint NOT NULL);
    CREATE TABLE points_given (job uuid PRIMARY KEY);
"""

import json
import os
import sys

import psycopg2

NEVER_AGAIN, TRY_AGAIN = 65, 75


def give(cursor, job):
    """Adds the points unless an earlier run of this job has; returns the account's points."""
    account, points = job["data"]["account"], int(job["data"]["points"])
    # Raises when this run has lost the job; else nobody can take it away before the commit.
    cursor.execute("SELECT tenure.assert_lease(%s, %s)", [job["id"], job["token"]])
    cursor.execute("INSERT INTO points_given (job) VALUES (%s) ON CONFLICT DO NOTHING", [job["id"]])
    cursor.execute(
        "UPDATE account SET points = points + %s WHERE name = %s RETURNING points",
        [points if cursor.rowcount else 0, account],
    )
    row = cursor.fetchone()
    if row is None:
        raise ValueError(f"there is no account {account!r}")
    return row[0]


def main():
    job = json.load(sys.stdin)
    try:
        db = psycopg2.connect(os.environ["DATABASE_URL"])
        with db, db.cursor() as cursor:
            points = give(cursor, job)
    except (KeyError, TypeError, ValueError) as error:
        print(f"wrong data: {error}", file=sys.stderr)
        return NEVER_AGAIN
    except psycopg2.OperationalError as error:
        print(f"the database: {error}", file=sys.stderr)
        return TRY_AGAIN
    json.dump({"points": points}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
