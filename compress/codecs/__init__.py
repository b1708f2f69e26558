"""The codecs, one file each, and the code they share."""
