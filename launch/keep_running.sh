#!/bin/bash
# Runs a command again after every failure, unless it fails 5 times within 10
# minutes each. That a run ended because another host was lost is a failure too:
# to stop a run, stop this with it, as `pkill -f` does by a word of the command.
exec 9>> keep_running.lock # The command inherits it, and may end after this.
if ! flock --wait 60 9; then
  echo 'Not started: a run goes on in this folder. Stop it first.' >&2
  exit 1
fi
failures=0
while true; do
  SECONDS=0
  "$@"
  status=$?
  if [ $status = 0 ]; then exit 0; fi
  if [ $SECONDS -ge 600 ]; then failures=0; fi
  failures=$((failures + 1))
  if [ $failures = 5 ]; then exit $status; fi
  echo "Exit status $status; trying again." >&2
  sleep 30
done
