"""`thinwire report` and `thinwire trace`: they read files that runs and benches left, and train nothing."""
