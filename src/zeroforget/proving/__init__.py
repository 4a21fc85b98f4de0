"""From a user's network to one that grows, proved on copies before it is handed over."""
