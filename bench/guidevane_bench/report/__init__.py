"""What a run showed: JSON for machines, Markdown and plots for people."""
