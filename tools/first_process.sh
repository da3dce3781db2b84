# The first process of a part of the checks: sh first_process.sh ANOTHER_CODE_THAT_PASSES COMMAND …
# Runs the commands up to the first that fails, with its exit code. Who is orphaned becomes a child of this process: they are
# collected while it waits, and ended behind the last command, since the CPU time of who is not waited for is lost.
passes=$1; shift
for command; do
    printf '$ %s\n' "$command"
    eval "$command"
    code=$?
    [ $code != "$passes" ] || code=0
    [ $code = 0 ] || break
done
for tenth in $(seq 59); do
    children=
    read -r children < /proc/$$/task/$$/children
    [ "$children" ] || break
    case $tenth in 5?) kill -s KILL $children ;; *1) kill -s TERM $children ;; esac
    sleep 0.1
done
exit $code
