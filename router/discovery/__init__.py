"""Where replicas are found: sources that each tell a whole set, and what puts the difference in force."""
