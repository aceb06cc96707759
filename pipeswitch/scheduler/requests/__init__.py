"""What clients asked: from arrival to answer."""
