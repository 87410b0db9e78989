"""What is wrong with the sizes of a run, in the user's own words: sizes, rules about them, the nearest values that work, dialects."""
