# Witness: writes what it lives through, one line at its start, one each 100 ms, one at its end.
#   WHAT JOB ATTEMPT TOKEN PID UPTIME DAEMON      WHAT: start | tick | end
# A line is one write to a file opened for appending, so the order of lines is the order of events over all handlers.
# $1 is the file, $2 the database. The job type says the rest:
#   ticks-N      lives for N ticks              exit-N       ends at once with that code
#   stubborn-N   the same, deaf to TERM         assassin-N   kills its daemon after N ticks
#   parent-N     ticks-N with two follow-ups    effects-N    ticks-N, then a row in the table `effects`, under its lease
set -u
say() {
    read -r uptime _ </proc/uptime
    echo "$1 $TENURE_JOB_ID $TENURE_ATTEMPT $TENURE_TOKEN $$ $uptime $daemon" >>"$journal"
}

# A follow-up job that says whose it is.
child() {
    echo "{\"job_type\":\"ticks-1\",\"data\":{\"parent\":\"$TENURE_JOB_ID\",\"number\":$1},\"max_attempts\":1000}"
}

# One transaction, on whichever server takes writes, and only while the lease is ours. A row that is there came with a commit whose
# answer was lost, or with a run whose end was lost and its commit was not.
effect() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        if said=$(psql -X -q -v ON_ERROR_STOP=1 "$database?target_session_attrs=read-write&connect_timeout=2" 2>&1 <<SQL
BEGIN;
SELECT tenure.assert_lease('$TENURE_JOB_ID', '$TENURE_TOKEN');
INSERT INTO effects SELECT '$TENURE_JOB_ID', '$TENURE_TOKEN' WHERE NOT EXISTS (SELECT FROM effects WHERE job = '$TENURE_JOB_ID');
COMMIT;
SQL
        ); then
            return 0
        fi
        echo "$said" >&2
        sleep 0.3
    done
    return 1
}

journal=$1
database=${2:-}
# Between a daemon and its handlers there is a supervisor each, which is the same program; other queues have none.
daemon=$PPID
read -r _ _ _ above _ <"/proc/$PPID/stat"
if [ "/proc/$PPID/exe" -ef "/proc/$above/exe" ]; then daemon=$above; fi
number=${TENURE_JOB_TYPE##*-}
say start
case $TENURE_JOB_TYPE in
exit-*)
    say end
    exit "$number"
    ;;
stubborn-*) trap '' TERM ;;
esac
while [ "$number" -gt 0 ]; do
    sleep 0.1
    say tick
    number=$((number - 1))
done
case $TENURE_JOB_TYPE in
assassin-*) kill -KILL "$daemon" && sleep 600 ;;
effects-*) effect || exit 75 ;;
esac
say end
case $TENURE_JOB_TYPE in
parent-*) follow=",\"tenure\":{\"enqueue\":[$(child 1),$(child 2)]}" ;;
esac
echo "{\"token\":\"$TENURE_TOKEN\"${follow:-}}"
