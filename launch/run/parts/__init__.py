"""The parts of a run: what it logs, scores, keeps and shows. Each keeps a state of its own."""
