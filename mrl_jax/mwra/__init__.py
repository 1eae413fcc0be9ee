"""MWRA: which policy runs on which devices."""
