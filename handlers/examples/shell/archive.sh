#!/bin/sh
# Keeps the envelope of each job as a file of $ARCHIVE_DIR.
#
#   [handlers.archive]
#   exec = { command = ["handlers/examples/shell/archive.sh"], env = ["ARCHIVE_DIR"] }
set -eu

if [ ! -d "$ARCHIVE_DIR" ]; then
    echo "$ARCHIVE_DIR is not there" >&2
    exit 75 # try again: perhaps the disk is not mounted yet
fi

# Written under another name first: nobody reads half of it, and a second run of the job replaces it.
draft=$ARCHIVE_DIR/.$TENURE_JOB_ID.$TENURE_TOKEN
trap 'rm -f "$draft"' EXIT
trap 'exit 143' TERM # so that the line above holds for a stop too
cat >"$draft"
echo "read $(wc -c <"$draft") bytes" >&2
mv "$draft" "$ARCHIVE_DIR/$TENURE_JOB_ID.json"
printf '{"file": "%s.json"}\n' "$TENURE_JOB_ID"
