"""What crosses between policies, and what each makes of it; numpy only."""
