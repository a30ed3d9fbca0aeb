"""The first hour of somebody who has never seen the project, as a program: `make first-hour`."""
