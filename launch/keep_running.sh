#!/bin/bash
# Runs a command again after every failure, unless it fails 5 times within 10
# minutes each. A run that was asked to stop, exit status 75, stays stopped.
failures=0
while true; do
  SECONDS=0
  "$@"
  status=$?
  if [ $status = 0 ] || [ $status = 75 ]; then exit $status; fi
  if [ $SECONDS -ge 600 ]; then failures=0; fi
  failures=$((failures + 1))
  if [ $failures = 5 ]; then exit $status; fi
  echo "Exit status $status; trying again." >&2
  sleep 30
done
