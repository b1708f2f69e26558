"""Where the stages live, and what their processes say to each other outside frames."""
