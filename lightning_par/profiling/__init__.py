"""What a run did: times, bytes and messages; its pictures and pages. Plain torch."""
