"""`thinwire partition`: the cost of each layer, and the best cut."""
