"""``python -m parrot`` is ``parrot``, where the script is not on the path."""

from .cli.main import main

if __name__ == "__main__":
    main()
