"""What a run says: metrics, summary, tables, pictures, and where else they go."""
