"""`thinwire export`: the model of a run, for the library that it came from."""
