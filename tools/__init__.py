"""What keeps the project in order: releases, notebooks, pages."""
