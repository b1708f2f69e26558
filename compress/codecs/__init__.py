"""The codecs, a file each, and what they share."""
