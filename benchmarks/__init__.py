"""Speed as ratios: each figure is measured beside a reference in the same run (`make bench`)."""
