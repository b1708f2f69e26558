"""What joins the stages of a run."""
