#!/bin/sh
# Fails at first and succeeds when it is tried again.
if [ "$TENURE_ATTEMPT" -lt 2 ]; then
    echo "the first attempt always fails" >&2
    exit 75
fi
echo "{\"attempt\": $TENURE_ATTEMPT}"
