"""`thinwire predict`: the speed of a pipeline over slow links, before training."""
