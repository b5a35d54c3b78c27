/* The first process of the node and of every pod: reaps what is orphaned, ends on TERM or INT. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
    sigset_t all;
    int signal_number;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, 0);
    for (;;) {
        if (sigwait(&all, &signal_number)) continue;
        if (signal_number == SIGTERM || signal_number == SIGINT) _exit(0);
        if (signal_number == SIGCHLD) while (waitpid(-1, 0, WNOHANG) > 0) {}
    }
}
