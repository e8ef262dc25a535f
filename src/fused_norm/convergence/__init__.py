"""Does training come out the same? Stock and fused models side by side, on real text."""
