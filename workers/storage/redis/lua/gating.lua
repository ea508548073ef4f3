-- From this script on there are GATES.
gated = true
