"""ActivityPub: the second wire of the delivery engine, and what applications call to owe activities by it."""
