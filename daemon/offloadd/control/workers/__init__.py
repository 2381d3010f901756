"""Worker processes: started, watched, heard, and mourned."""
