"""`thinwire bench`: measurements of codecs and links on this machine."""
