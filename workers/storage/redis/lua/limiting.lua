-- From this script on there are GATES.
limited = true
