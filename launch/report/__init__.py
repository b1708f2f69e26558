"""`thinwire report`: it reads the files of runs and benches, and trains nothing."""
