"""`thinwire report` and `thinwire trace`: they read the files of runs and benches, and train nothing."""
