# Prints whatever a handler can see of its daemon's secrets.
env
tr '\0' ' ' <"/proc/$PPID/cmdline"
echo
ls -l "/proc/$$/fd"
