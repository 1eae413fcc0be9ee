"""The report of a run, and the page that compares several runs."""
