"""One suite that every process group passes: our groups do what plain torch does, in a bounded time."""
