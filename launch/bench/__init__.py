"""`thinwire bench`: what is measured on this machine."""
