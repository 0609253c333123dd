"""One suite that every process group passes: what plain torch does, ours do, and as long as it may take."""
