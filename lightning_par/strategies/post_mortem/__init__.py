"""What a rank says and leaves behind when it dies: of its memory, and of ranks that it missed."""
