# Witness: writes what it lives through, one line at its start, one each 100 ms, one at its end.
#   WHAT JOB ATTEMPT TOKEN PID UPTIME      WHAT: start | tick | end
# A line is one write to a file opened for appending, so the order of lines is the order of events over all handlers.
# $1 is the file. The job type says the rest:
#   ticks-N      lives for N ticks              exit-N       ends at once with that code
#   stubborn-N   the same, deaf to TERM         assassin-N   kills its daemon after N ticks
set -u
say() {
    read -r uptime _ </proc/uptime
    echo "$1 $TENURE_JOB_ID $TENURE_ATTEMPT $TENURE_TOKEN $$ $uptime" >>"$journal"
}

journal=$1
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
assassin-*) kill -KILL "$PPID" && sleep 600 ;;
esac
say end
echo "{\"token\":\"$TENURE_TOKEN\"}"
