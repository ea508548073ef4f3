-- Answers the limits by name, each as in GATES.
return cmsgpack.pack(gated and gates().limits() or {})
