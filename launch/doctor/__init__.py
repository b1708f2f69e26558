"""`thinwire doctor`: what this machine can do, and how it and the other machines of a run reach each other."""
