"""Plans that need less memory than those of the search."""
