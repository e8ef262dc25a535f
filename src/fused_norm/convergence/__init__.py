"""Training of stock and fused models side by side on real text, judged against a measured noise floor."""
