"""Codecs whose work on a card is one kernel each way, written in Triton; the eager code is what they must equal."""
