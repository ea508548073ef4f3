-- Answers the limits by name, each as in GATES.
return cmsgpack.pack(limited and holding().limits() or {})
