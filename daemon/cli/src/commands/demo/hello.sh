#!/bin/sh
# Greets whoever the job's data name. The envelope comes on standard input, the result goes to standard output.
name=$(sed -n 's/.*"name": *"\([^"]*\)".*/\1/p')
echo "{\"greeting\": \"Hello, ${name:-world}!\"}"
