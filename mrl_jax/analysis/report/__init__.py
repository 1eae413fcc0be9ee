"""The report: one page that tells a person what a run did."""
