/* A cable between two hosts that takes its time: what enters at one end leaves the other one later.
 *
 * cable DELAY DESCRIPTOR NAME NAME
 *
 * DELAY in microseconds. The ends are TAP devices: the first in the network namespace that DESCRIPTOR
 * is open on, the second in this one. They are there once it has said "ready", while it lives.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/* More frames than that under way are dropped, as a router does. */
enum { FRAMES = 1024, LARGEST = 70000 };

struct frame {
    int64_t due;
    ssize_t size;
    char bytes[LARGEST];
};

struct direction {
    int from, to;
    uint64_t entered, left;
    struct frame frames[FRAMES];
};

static struct direction directions[2];

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static int checked(int result, const char *what) {
    if (result < 0) {
        perror(what);
        exit(1);
    }
    return result;
}

/* Segments of TCP stay in one piece of up to 64 KiB, with a header that says how to divide it. */
static int open_end(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int end = checked(open("/dev/net/tun", O_RDWR | O_NONBLOCK), "/dev/net/tun");
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    checked(ioctl(end, TUNSETIFF, &request), name);
    checked(ioctl(end, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6), name);
    return end;
}

static void take_in(struct direction *way, int64_t delay) {
    static char dropped[LARGEST];
    for (;;) {
        int is_full = way->entered - way->left == FRAMES;
        struct frame *frame = &way->frames[way->entered % FRAMES];
        ssize_t size = read(way->from, is_full ? dropped : frame->bytes, LARGEST);
        if (size <= 0) return;
        if (is_full) continue;
        frame->size = size;
        frame->due = now() + delay;
        way->entered++;
    }
}

/* Returns how long it is until the next frame is due, in nanoseconds; -1: none is under way. */
static int64_t let_out(struct direction *way) {
    while (way->left < way->entered) {
        struct frame *frame = &way->frames[way->left % FRAMES];
        int64_t wait = frame->due - now();
        if (wait > 0) return wait;
        /* An end that is down takes nothing: the frame is lost. */
        if (write(way->to, frame->bytes, frame->size) < 0) { }
        way->left++;
    }
    return -1;
}

int main(int count, char **words) {
    if (count != 5) return 2;
    int64_t delay = atoll(words[1]) * 1000;
    int here = open_end(words[4]);
    checked(setns(atoi(words[2]), CLONE_NEWNET), "setns");
    int there = open_end(words[3]);
    directions[0].from = directions[1].to = here;
    directions[0].to = directions[1].from = there;
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct pollfd ends[] = {{here, POLLIN, 0}, {there, POLLIN, 0}};
        int64_t wait = -1;
        for (int i = 0; i < 2; i++) {
            int64_t own = let_out(&directions[i]);
            if (own >= 0 && (wait < 0 || own < wait)) wait = own;
        }
        struct timespec time = {wait / 1000000000, wait % 1000000000};
        ppoll(ends, 2, wait < 0 ? NULL : &time, NULL);
        for (int i = 0; i < 2; i++) {
            if (ends[i].revents & POLLERR) return 0; /* its namespace has ended */
            if (ends[i].revents) take_in(&directions[i], delay);
        }
    }
}
