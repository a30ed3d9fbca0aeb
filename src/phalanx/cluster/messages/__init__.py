"""Messages in English and in Chinese."""
